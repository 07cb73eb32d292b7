"""Measurements and resource checks, run from a checkout; no part of the installed package."""
