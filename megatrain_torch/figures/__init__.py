"""The words and pictures that plans, traces and reports share: lanes of a timeline, bars of memory, a step's
report. Looks at base.
"""
