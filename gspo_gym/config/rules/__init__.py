"""Rules across sections: contradictions, which are errors, and notices."""
