"""What the compiler works on: typed expressions, modules, programs of passes, payload layouts."""
