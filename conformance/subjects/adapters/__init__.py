"""DDPs of other projects, each called the way torch's own is called; a library is imported when it is wanted."""
