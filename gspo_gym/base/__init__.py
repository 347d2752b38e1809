"""Foundations of every room: settings records, files, retries, keys, HTTP and JSON."""
