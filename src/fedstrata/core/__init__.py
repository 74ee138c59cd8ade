"""What every layer uses: errors, options, random numbers, schedules, files. Imports nothing else of the package."""
