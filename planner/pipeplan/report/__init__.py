"""The report on a plan and its run: one HTML page, and the JSON document that it shows. docs/report.md.

Each module makes one part of the document; `build` assembles them and makes the page. Scripts and styles are in
templates/report/.
"""
