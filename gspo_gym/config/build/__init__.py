"""Turn a checked configuration into live objects: the only place where names become classes."""
