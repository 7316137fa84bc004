"""The words and tables that plans, traces and reports share: lanes of a timeline, bars of memory, a step's
report. Looks at base.
"""
