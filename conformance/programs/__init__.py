"""Programs that several chapters share: functions that every rank runs, each with what ranks must observe."""
