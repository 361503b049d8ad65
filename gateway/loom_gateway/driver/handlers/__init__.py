"""The handlers of the driver, a module for each subject of messages.

The dispatcher alone imports most of them: it joins their tables, and each subject changes for its own reasons.
"""
