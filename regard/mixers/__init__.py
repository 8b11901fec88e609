"""One mechanism, one file: its equation, its function over an op, its layer, its catalogue record."""
