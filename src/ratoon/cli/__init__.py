"""The command line: one file a verb; heavy modules are imported inside the verbs."""
