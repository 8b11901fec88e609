"""The recurrent family's backends: states instead of softmaxes. `regard.backends` chooses among them."""
