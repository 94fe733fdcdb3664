"""The appearance of rows: one table of colours, one page format, and a module for each form of picture."""
