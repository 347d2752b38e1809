"""Rules across sections: what a configuration may not say at once, and what is worth a notice."""
