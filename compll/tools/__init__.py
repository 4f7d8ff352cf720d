"""The command line: texts, figures and files about a spec."""
