"""The run file: schema, loading, rules. Nothing here imports torch or looks at the machine."""
