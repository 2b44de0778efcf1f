package server

import (
	"bytes"
	"crypto/sha256"
	_ "embed"
	"encoding/base64"
	"net/http"
	"regexp"
	"strings"
	"time"
)

// page is the page of the server: a chat, and the state of the engines. It has no other files.
//
//go:embed page.html
var page []byte

var (
	pageTag    = `"` + digest(page) + `"`
	pagePolicy = policyOf(page)
)

func digest(data []byte) string {
	sum := sha256.Sum256(data)
	return base64.StdEncoding.EncodeToString(sum[:])
}

// policyOf returns the Content-Security-Policy of a page. Only the script and the style that the
// page contains apply, and only this server can be contacted. Trusted types make the browser refuse
// text of models as HTML, if the script has a mistake.
func policyOf(page []byte) string {
	inline := regexp.MustCompile(`(?s)<(script|style)>(.*?)</(?:script|style)>`)
	var policy strings.Builder
	policy.WriteString("default-src 'none'; ")
	for _, match := range inline.FindAllSubmatch(page, -1) {
		policy.WriteString(string(match[1]) + "-src 'sha256-" + digest(match[2]) + "'; ")
	}
	policy.WriteString("connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; " +
		"frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'")
	return policy.String()
}

// home sends the page. It needs no key, because it contains none of the server's data.
func (s *Server) home(w http.ResponseWriter, r *http.Request) error {
	header := w.Header()
	header.Set("Content-Type", "text/html; charset=utf-8")
	header.Set("Content-Security-Policy", pagePolicy)
	header.Set("X-Content-Type-Options", "nosniff")
	header.Set("X-Frame-Options", "DENY") // for browsers without frame-ancestors
	header.Set("Referrer-Policy", "no-referrer")
	header.Set("Cross-Origin-Opener-Policy", "same-origin")
	// The browser keeps the page, and sends its tag to learn whether the server has another one.
	header.Set("Cache-Control", "no-cache")
	header.Set("ETag", pageTag)
	http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(page))
	return nil
}

// The limits of a snapshot. The page draws no more blocks, and an answer has at most some 500 KB.
const (
	maxSnapshotBlocks    = 16384
	maxSnapshotSequences = 256
)

// snapshot sends the state of an engine: the JSON of the library.
func (s *Server) snapshot(w http.ResponseWriter, r *http.Request) error {
	model, err := s.model(r.Context(), r.URL.Query().Get("model"))
	if err != nil {
		return err
	}
	text, err := model.Engine.Snapshot(maxSnapshotBlocks, maxSnapshotSequences)
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(http.StatusOK)
	w.Write(text) // fails only if the client has gone
	return nil
}
