"""A profile's DAG as a picture: in the terminal, as SVG, and as Graphviz's dot."""
