"""Speed of the parts, each next to what the machine or plain torch can do."""
