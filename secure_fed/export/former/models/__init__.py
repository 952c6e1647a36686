"""The former place of `secure_fed.learning.models`, of which exported folders import `loading.locate`."""
