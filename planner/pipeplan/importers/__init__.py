"""Readers of other projects' files: profiles of layers, and measurements of links."""
