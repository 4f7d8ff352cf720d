"""The compiler's data: typed expressions, modules, programs of passes, payload layouts."""
