"""Complete named runs: one file, one function of the same name that returns a Config; no logic."""
