package server

import (
	"bufio"
	"crypto/sha256"
	"crypto/subtle"
	"io"
	"net/http"
	"strings"
)

// Keys are digests of API keys. Digests have one length, so that a comparison takes the same time
// for any key.
type Keys [][sha256.Size]byte

// ReadKeys reads one key from each line. Empty lines and lines that begin with # are skipped.
func ReadKeys(r io.Reader) (keys Keys, err error) {
	lines := bufio.NewScanner(r)
	for lines.Scan() {
		if key := strings.TrimSpace(lines.Text()); key != "" && !strings.HasPrefix(key, "#") {
			keys = append(keys, sha256.Sum256([]byte(key)))
		}
	}
	return keys, lines.Err()
}

// has compares with every key, in constant time.
func (k Keys) has(key string) bool {
	digest := sha256.Sum256([]byte(key))
	found := 0
	for i := range k {
		found |= subtle.ConstantTimeCompare(digest[:], k[i][:])
	}
	return found == 1
}

// authorized refuses a request without a valid key. OpenAI sends the key as a bearer token and
// Anthropic in x-api-key.
func (s *Server) authorized(answer endpoint) endpoint {
	return func(w http.ResponseWriter, r *http.Request) error {
		if len(s.options.Keys) == 0 {
			return answer(w, r)
		}
		key := r.Header.Get("X-Api-Key")
		scheme, token, _ := strings.Cut(r.Header.Get("Authorization"), " ")
		if strings.EqualFold(scheme, "Bearer") {
			key = strings.TrimSpace(token)
		}
		if key == "" {
			return unauthorized("missing_api_key",
				"the request has no API key; send it as bearer token or in x-api-key")
		}
		if !s.options.Keys.has(key) {
			return unauthorized("invalid_api_key",
				"the API key is not valid; send one of the keys of the server")
		}
		return answer(w, r)
	}
}

func unauthorized(code, message string) *apiError {
	e := refusal(http.StatusUnauthorized, message)
	e.code = code
	return e
}
