"""Execution of programs: jobs, lanes, and the detection of lost peers."""
