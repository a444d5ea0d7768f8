"""What a compiled step costs, read from the program itself before it ever runs."""
