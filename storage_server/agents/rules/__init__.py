"""The pure part: agents and their regions, and ids that were used. Pure: time is an argument."""
