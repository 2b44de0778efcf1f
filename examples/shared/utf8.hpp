// Text that is not valid UTF-8. The command-line tool and the C++ server share it.
#pragma once

#include <cstdio>
#include <string>
#include <string_view>

namespace utf8 {

// Returns the length of the character at the beginning of the bytes, or 0 if they begin with none.
inline size_t character_length(std::string_view bytes) {
    const auto byte = [&](size_t i) { return i < bytes.size() ? static_cast<unsigned char>(bytes[i]) : 0u; };
    const unsigned first = byte(0);
    if (first < 0x80) return bytes.empty() ? 0 : 1;
    if (first < 0xc2 || first > 0xf4) return 0;
    // The second byte decides whether a character is overlong, a surrogate or beyond U+10FFFF.
    const unsigned low = first == 0xe0 ? 0xa0 : first == 0xf0 ? 0x90 : 0x80;
    const unsigned high = first == 0xed ? 0x9f : first == 0xf4 ? 0x8f : 0xbf;
    if (byte(1) < low || byte(1) > high) return 0;
    const size_t length = first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
    for (size_t i = 2; i < length; i++) {
        if ((byte(i) & 0xc0) != 0x80) return 0;
    }
    return length;
}

inline bool is_valid(std::string_view bytes) {
    while (const size_t length = character_length(bytes)) bytes.remove_prefix(length);
    return bytes.empty();
}

// Returns a byte as an escape (\xe2).
inline std::string escape(char byte) {
    char text[5];
    std::snprintf(text, sizeof text, "\\x%02x", static_cast<unsigned char>(byte));
    return text;
}

// Returns the bytes of a token as text, with escapes (\xe2) if they are not UTF-8.
inline std::string printable(std::string_view bytes) {
    if (is_valid(bytes)) return std::string(bytes);
    std::string text;
    for (const char byte : bytes) text += escape(byte);
    return text;
}

// Replaces each byte that belongs to no character by U+FFFD.
inline std::string repaired(std::string_view bytes) {
    std::string text;
    while (!bytes.empty()) {
        const size_t length = character_length(bytes);
        if (length > 0) {
            text += bytes.substr(0, length);
        } else {
            text += "\xef\xbf\xbd";
        }
        bytes.remove_prefix(length > 0 ? length : 1);
    }
    return text;
}

}  // namespace utf8
