"""The command line, and what it shows of a spec or writes."""
