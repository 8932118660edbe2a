"""Compiled code behind one seam."""
