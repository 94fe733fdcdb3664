"""How rows look: one table of colours, one kind of page, and a module for each form of picture."""
