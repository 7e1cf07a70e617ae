"""Commands that predict and choose: ``advise``, ``size``, ``simulate``."""
