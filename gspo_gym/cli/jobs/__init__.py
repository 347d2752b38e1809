"""`gspo-gym jobs serve`: train what clients of the hosted trainer submit, as jobs."""
