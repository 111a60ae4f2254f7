"""Programs that load an export by its format's own software, each in a process of its own.

They import nothing of drivetrain but how question and answer are written (exchange.py), so that an export which only
this project could load is found out.
"""
