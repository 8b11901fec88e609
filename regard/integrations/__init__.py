"""Other libraries, each imported only when asked: ``import regard.integrations.transformers``."""
