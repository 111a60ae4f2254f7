"""The run file: its schema, how it is read, and the rules of which combinations work.

Nothing here imports torch or looks at the machine.
"""
