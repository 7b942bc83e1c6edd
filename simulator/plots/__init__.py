"""Figures of the results, in one restrained style.

Every function returns a matplotlib `Figure` and touches no global state; `save` writes
it, and `save_all_kinds` as PNG, SVG and PDF.  Colours are Okabe and Ito's, told apart by the
colour-blind; line style and marker tell series apart in greyscale.  Intervals are 95% bootstrap
intervals over prompts.
"""
