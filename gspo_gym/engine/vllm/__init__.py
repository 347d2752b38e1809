"""vLLM as an engine, in this process or as a server, and the transfer of weights into it."""
