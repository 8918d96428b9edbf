"""Speed of the parts, each beside what the machine or the bare tool can do."""
