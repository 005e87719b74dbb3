"""Decisions on deliveries. Pure: no clock."""
