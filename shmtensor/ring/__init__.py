"""Slots: their layout, their life cycle, and both ends of a ring."""
