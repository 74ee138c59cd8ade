"""Used by every layer: errors, options, random numbers, schedules, files. Imports nothing else from the package."""
