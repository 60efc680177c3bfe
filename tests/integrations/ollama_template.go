// Renders conversations with a template as Ollama does (template.Execute): reads {template, conversations} from standard
// input, and writes the texts.
package main

import (
	"encoding/json"
	"os"
	"strings"
	"text/template"
)

type message struct {
	Role    string `json:"role"`
	Content string `json:"content"`
}

type request struct {
	Template      string      `json:"template"`
	Conversations [][]message `json:"conversations"`
}

func main() {
	var input request
	if err := json.NewDecoder(os.Stdin).Decode(&input); err != nil {
		panic(err)
	}
	parsed := template.Must(template.New("").Option("missingkey=zero").Parse(input.Template))
	texts := []string{}
	for _, conversation := range input.Conversations {
		var system []string
		var messages []*message
		for _, each := range conversation {
			if each.Role == "system" {
				system = append(system, each.Content)
			}
			if last := len(messages) - 1; last >= 0 && messages[last].Role == each.Role {
				messages[last].Content += "\n\n" + each.Content
			} else {
				copied := each
				messages = append(messages, &copied)
			}
		}
		var text strings.Builder
		values := map[string]any{"System": strings.Join(system, "\n\n"), "Messages": messages, "Response": ""}
		if err := parsed.Execute(&text, values); err != nil {
			panic(err)
		}
		texts = append(texts, text.String())
	}
	if err := json.NewEncoder(os.Stdout).Encode(texts); err != nil {
		panic(err)
	}
}
