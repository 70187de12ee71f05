"""The studies of `seqdefer.paper` as tables, LaTeX, figures and pages."""
