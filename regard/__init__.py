"""regard: attention mechanisms behind one contract."""
