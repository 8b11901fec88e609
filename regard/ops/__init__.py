"""The verbs: check the arguments, build the record of the call, select a backend, run it."""
