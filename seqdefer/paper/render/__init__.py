"""Studies as tables, LaTeX, figures, files and a page."""
