"""What is wrong with a run, in sentences, and which key to change. Begin reading at `command.py`."""
