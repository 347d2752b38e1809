"""The working programs: each module is one small file that a mutation will break. Standard library only."""
