"""A model and its weights: load, adapt, stage, attest, check in; the reference model beside it."""
