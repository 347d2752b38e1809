"""A stand-in for omegaconf, of which skyrl-gym needs attribute access and this project only `create`."""


class OmegaConf:
    @staticmethod
    def create(values):
        return values
