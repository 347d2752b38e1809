"""SupportDesk: serve the customers of a shop by talking and by tools, within a written policy."""
