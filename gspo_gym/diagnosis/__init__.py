"""One view of a run, and findings as small functions of it: live alarms, `doctor`, the page; and the oracle."""
