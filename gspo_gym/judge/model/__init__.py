"""A chat model as the judge: prompt, transcript, verdict."""
